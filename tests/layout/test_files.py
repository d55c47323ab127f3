"""The layout of files: opened by the safetensors library, and looked at byte by byte."""

import json
import random
from math import prod

import pytest
import safetensors.torch
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flagstone.checkpoint.manifest import FILE_NAME
from flagstone.layout import BLOCK, DTYPES, TensorSpec, files, index_of, lay_out, lay_out_file

fast = settings(deadline=None, max_examples=60)

dtypes = st.sampled_from(list(DTYPES))
shapes = st.one_of(
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.tuples(st.sampled_from([64, 1024, 4096, 4097])),  # sizes at and beside blocks
)
keys = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ['a"b', "a\\b", "a\nb", "a\tb", "\x00", " ", "", "é", "模型.层.0", "😀", "{}", "[0]", "a/b", ".", "__meta__"]
    ),
)
groups = st.sampled_from(
    ["model", "Model", "MODEL", "a/b", "a:b", "", ".", "..", "-x", "模型", "é", "rank-00000", "x" * 300]
)

ONE_GROUP = st.just("model")


@st.composite
def tensors(draw, groups=ONE_GROUP):
    names = draw(st.lists(st.tuples(groups, keys), max_size=8, unique=True))
    return [TensorSpec(f"{g}.{k}", g, k, draw(dtypes), draw(shapes)) for g, k in names]


def content(layout):
    """Bytes for the tensors of a file, none of them a NaN's, and the file."""
    rng = random.Random(layout.size)
    data = {s.key: bytes(rng.choices(range(1, 59), k=s.nbytes)) for s in layout.slots}
    data |= {s.key: bytes(b & 1 for b in data[s.key]) for s in layout.slots if s.dtype == "bool"}
    return data, layout.header + b"".join(data[s.key] for s in layout.slots)


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@fast
@given(tensors())
def test_the_safetensors_library_reads_every_tensor_as_it_was_written(specs):
    for layout in lay_out(specs):
        data, file = content(layout)
        loaded = safetensors.torch.load(file)
        assert {k: as_bytes(t) for k, t in loaded.items()} == data
        for slot in layout.slots:
            assert tuple(loaded[slot.key].shape) == slot.shape + DTYPES[slot.dtype].tail


@pytest.mark.parametrize("name", DTYPES)
def test_a_file_on_disk_opens_with_the_element_type_that_was_meant(name, tmp_path):
    (layout,) = lay_out([TensorSpec("w", "model", "w", name, (3, 2))])
    data, file = content(layout)
    (tmp_path / layout.file).write_bytes(file)
    loaded = safetensors.torch.load_file(tmp_path / layout.file)["w"]
    dtype = DTYPES[name]
    stored_otherwise = {"float8_e8m0fnu": torch.uint8, "complex32": torch.float16, "complex128": torch.float64}
    assert loaded.dtype == stored_otherwise.get(name, getattr(torch, name))
    assert getattr(torch, name).itemsize == dtype.size
    assert as_bytes(loaded) == data["w"]


@fast
@given(tensors())
def test_slots_tile_the_data_without_a_hole(specs):
    for layout in lay_out(specs):
        at = len(layout.header)
        for slot in layout.slots:
            assert slot.begin == at
            assert slot.nbytes == prod(slot.shape) * DTYPES[slot.dtype].size
            at = slot.end
        assert at == layout.size


@fast
@given(tensors())
def test_data_begins_on_a_block_and_so_does_every_tensor_of_whole_blocks(specs):
    for layout in lay_out(specs):
        assert len(layout.header) % BLOCK == 0
        assert 8 + int.from_bytes(layout.header[:8], "little") == len(layout.header)
        assert all(s.begin % BLOCK == 0 for s in layout.slots if s.nbytes % BLOCK == 0)


@fast
@given(tensors())
def test_every_tensor_is_aligned_to_its_elements(specs):
    for layout in lay_out(specs):
        assert all(s.begin % DTYPES[s.dtype].size == 0 for s in layout.slots)


@fast
@given(tensors(groups))
def test_every_tensor_has_one_place_in_a_file_of_its_group_alone(specs):
    layouts = lay_out(specs)
    placed = [(s.name, s.key, s.dtype, s.shape) for f in layouts for s in f.slots]
    assert sorted(placed) == sorted((t.name, t.key, t.dtype, t.shape) for t in specs)
    group = {t.name: t.group for t in specs}
    assert all(len({group[s.name] for s in f.slots}) == 1 for f in layouts)


@fast
@given(tensors(groups))
def test_the_same_tensors_are_laid_out_the_same(specs):
    assert lay_out(specs) == lay_out(list(specs))


@fast
@given(st.lists(st.one_of(groups, st.text(max_size=12)), unique=True, max_size=12))
def test_file_names_are_allowed_everywhere_and_differ_without_regard_to_case(names):
    layouts = lay_out([TensorSpec(f"{g}.w", g, "w", "uint8", (1,)) for g in names])
    found = [f.file for f in layouts]
    assert len({f.lower() for f in found}) == len(names)
    assert all(FILE_NAME.fullmatch(f) for f in found)  # what a manifest takes


@pytest.mark.parametrize("group", ["rank-00000", "Rank-00000", "a-00001-of-00002", "a-1-of-1"])
def test_a_group_never_takes_the_name_of_a_rank_file_or_of_a_volume(group):
    specs = [TensorSpec(f"a.{i}", "a", str(i), "uint8", (10,)) for i in range(2)]
    found = [f.file for f in lay_out([*specs, TensorSpec("w", group, "w", "uint8", (1,))], file_bytes=10)]
    assert found == ["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors", f"{group}_.safetensors"]


def test_a_large_group_is_split_where_a_file_is_full():
    specs = [TensorSpec(f"m.{i}", "m", str(i), "uint8", (n,)) for i, n in enumerate([40, 60, 1, 250, 5, 95, 0])]
    layouts = lay_out(specs, file_bytes=100)
    assert [f.file for f in layouts] == [f"m-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert [{s.key for s in f.slots} for f in layouts] == [{"0", "1"}, {"2"}, {"3"}, {"4", "5", "6"}]


def test_long_names_are_split_before_the_header_is_longer_than_the_format_allows(monkeypatch):
    monkeypatch.setattr(files, "HEADER_BYTES", 10_000)
    specs = [TensorSpec(f"{i}", "m", "\n" * 500 + str(i), "complex128", (0,) + (1 << 40,) * 20) for i in range(50)]
    layouts = lay_out(specs)
    assert sum(len(f.slots) for f in layouts) == 50
    assert all(len(f.header) <= 10_000 + 2 * BLOCK for f in layouts)


@fast
@given(tensors())
def test_the_index_says_the_file_of_every_tensor_as_transformers_reads_it(specs):
    layouts = lay_out(specs, file_bytes=1)
    assume(len(layouts) > 1)
    name, text = index_of(layouts)
    index = json.loads(text)
    assert name == "model.safetensors.index.json"
    assert index["weight_map"] == {s.key: f.file for f in layouts for s in f.slots}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in specs)


def test_a_file_says_what_transformers_asks_for_and_what_the_caller_adds():
    layout = lay_out_file("x.safetensors", [], {"flagstone": '{"a": 1}'})
    assert json.loads(layout.header[8:])["__metadata__"] == {"format": "pt", "flagstone": '{"a": 1}'}


@pytest.mark.parametrize("key", ["w", "__metadata__"])
def test_a_name_that_is_taken_in_the_file_is_refused(key):
    specs = [TensorSpec("a.w", "m", "w", "uint8", (1,)), TensorSpec("b.w", "m", key, "uint8", (1,))]
    with pytest.raises(ValueError, match=key):
        lay_out(specs)


def test_no_tensors_are_no_files():
    assert lay_out([]) == []
