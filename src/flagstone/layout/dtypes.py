"""Element types: the names that people use, and how a safetensors file holds each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: as torch and numpy call it, for example ``bfloat16``.
        size: bytes of one element.
        stored: the safetensors type of the file that holds it.
        tail: dimensions that the file adds at the end, where the format has no such type: a complex128 is two F64.
    """

    name: str
    size: int
    stored: str
    tail: tuple[int, ...] = ()


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("bool", 1, "BOOL"),
        DType("uint8", 1, "U8"),
        DType("int8", 1, "I8"),
        DType("uint16", 2, "U16"),
        DType("int16", 2, "I16"),
        DType("uint32", 4, "U32"),
        DType("int32", 4, "I32"),
        DType("uint64", 8, "U64"),
        DType("int64", 8, "I64"),
        DType("float16", 2, "F16"),
        DType("bfloat16", 2, "BF16"),
        DType("float32", 4, "F32"),
        DType("float64", 8, "F64"),
        DType("float8_e4m3fn", 1, "F8_E4M3"),
        DType("float8_e5m2", 1, "F8_E5M2"),
        DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
        DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
        DType("float8_e8m0fnu", 1, "U8"),
        DType("complex32", 4, "F16", (2,)),
        DType("complex64", 8, "C64"),
        DType("complex128", 16, "F64", (2,)),
    )
}
