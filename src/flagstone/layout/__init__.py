"""Arithmetic of layouts: boxes, spans, shardings, files. No torch, no input or output."""

from flagstone.layout.box import Box, Span, box_span, box_spans, intersect, span_boxes
from flagstone.layout.dtypes import DTYPES, DType
from flagstone.layout.files import BLOCK, FileLayout, Slot, TensorSpec, index_of, lay_out, lay_out_file
from flagstone.layout.flat import FlatLayout, Place, overlap
from flagstone.layout.sharding import FLAT, Sharding

__all__ = [
    "BLOCK",
    "DTYPES",
    "FLAT",
    "Box",
    "DType",
    "FileLayout",
    "FlatLayout",
    "Place",
    "Sharding",
    "Slot",
    "Span",
    "TensorSpec",
    "box_span",
    "box_spans",
    "index_of",
    "intersect",
    "lay_out",
    "lay_out_file",
    "overlap",
    "span_boxes",
]
