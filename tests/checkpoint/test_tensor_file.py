"""Files that are written tensor by tensor are those of safetensors itself."""

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from mpitrain.checkpoint.tensor_file import _NAMES, Described, body, describe, header, order_of


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


def test_what_has_no_name_there_is_refused():
    with pytest.raises(TypeError, match="strange: safetensors cannot hold tensors of torch.complex128"):
        header({"strange": Described(torch.complex128, (1,))})
