"""Files that are written tensor by tensor are those of safetensors itself."""

import hashlib
import io
import json

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from mpitrain.checkpoint.payload import read
from mpitrain.checkpoint.tensor_file import _NAMES, Described, body, describe, described_by, header, order_of


def written(tensors, metadata=None):
    described = describe(tensors)
    return b"".join([header(described, metadata), *(body(tensors[name]) for name in order_of(described))])


@pytest.mark.parametrize("metadata", [None, {}, {"strategy": 'ä "quoted"\n'}])
def test_same_bytes(metadata):
    tensors = {
        "b": torch.ones(3),
        "a": torch.zeros(()),
        "empty": torch.zeros(0, 4),
        "ünï\t": torch.ones(2, 2).t(),
    }
    tensors |= {str(dtype): (torch.arange(6) % 2).view(2, 3).float().to(dtype) for dtype in _NAMES}
    assert written(tensors, metadata) == save({k: t.contiguous() for k, t in tensors.items()}, metadata)
    assert written({}) == save({})


def test_tied_tensors_are_written_for_each_name(tmp_path):
    tied = torch.arange(4.0)
    (tmp_path / "file").write_bytes(written({"one": tied, "other": tied[1:3]}, {"some": "thing"}))
    found = load_file(tmp_path / "file")
    assert found["one"].tolist() == [0, 1, 2, 3] and found["other"].tolist() == [1, 2]
    save_file(found, tmp_path / "again", {"some": "thing"})
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()


def test_what_was_written_is_read_to_the_bit_with_its_digest():
    tensors = {"a": torch.tensor(2.5), "empty": torch.zeros(0, 4), "c": torch.tensor([1 + 2j])}
    tensors |= {str(dtype): (torch.arange(6) % 2).view(2, 3).float().to(dtype) for dtype in _NAMES}
    data = written(tensors, {"some": "thing"})
    digest, found, why_not = read(io.BytesIO(data), len(data))
    assert (
        why_not is None and digest == hashlib.sha256(data).hexdigest() and written(found) == written(tensors)
    )
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (one.dtype, one.shape) for name, one in tensors.items()
    }


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "no JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 10**5,
    "another type": entry([2], [0, 8], "F31"),
    "a text for a size": entry(["2"], [0, 8]),
    "a fraction": entry([2.0], [0, 8]),
    "less than nothing": entry([-1, -2], [0, 8]),
    "too large to count": entry([2**62, 4], [0, 0]),
    "more than there is": entry([4], [0, 16]),
    "less than there is": entry([1], [0, 4]),
    "a hole": entry([1], [4, 8]),
    "no place": {"dtype": "F32", "shape": [2]},
    "no entry": 3,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_does_not_say_what_follows_is_refused_and_the_file_digested_all_the_same(name):
    text = HOSTILE[name] if isinstance(HOSTILE[name], bytes) else json.dumps({"a": HOSTILE[name]}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    digest, found, why_not = read(io.BytesIO(data), len(data))
    assert not found and why_not is not None and digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("other", [[4, 12], [0, 8]])
def test_tensors_that_share_bytes_are_refused(other):
    text = json.dumps({"a": entry([2], [0, 8]), "b": entry([2], other)}).encode()
    with pytest.raises(ValueError, match="does not lie where the tensor before it ends"):
        described_by(text, 12)


def test_what_has_no_name_there_is_refused():
    with pytest.raises(TypeError, match="strange: safetensors cannot hold tensors of torch.complex128"):
        header({"strange": Described(torch.complex128, (1,))})
