"""NetCDF-4 and plain HDF5 files as they are: dimensions, packed and missing values, groups, columns."""

import h5py
import numpy as np
import pytest
import torch

from mpitrain import Shards
from mpitrain.errors import DataError, UsageError

COUNT, LAT, LON = 50, 4, 6
RNG = np.random.default_rng(0)
PACKED = RNG.integers(-999, 999, (COUNT, LAT, LON)).astype(np.int16)
PACKED[7, 2, 3] = -32768  # missing
FLOATS = RNG.standard_normal((COUNT, LAT, LON)).astype(np.float32)
FLOATS[9] = 1e20
LABELS = RNG.integers(0, 9, COUNT).astype(np.int32)


def dimension(file, name, size, values=None, unlimited=False):
    """As netCDF-4 writes one: a scale, with values or without."""
    maxshape = (None,) if unlimited else (size,)
    data = np.arange(size, dtype=np.float64) if values is None else values
    scale = file.create_dataset(name, data=data, maxshape=maxshape, chunks=(8,) if unlimited else None)
    scale.make_scale(name)
    scale.attrs["_Netcdf4Dimid"] = np.int32(len(file) - 1)
    return scale


def variable(file, name, data, dimensions, attributes=None, **options):
    unlimited = dimensions[0].maxshape[0] is None
    layout = {"chunks": (8, *data.shape[1:]), "maxshape": (None, *data.shape[1:])} if unlimited else {}
    made = file.create_dataset(name, data=data, **layout | options)
    for number, scale in enumerate(dimensions):
        made.dims[number].attach_scale(scale)
    made.attrs.update(attributes or {})
    return made


def write(path, change=lambda file, scales: None):
    with h5py.File(path, "w") as file:
        file.attrs["_NCProperties"] = "version=2,netcdf=4.9.2,hdf5=1.14.2"
        time = dimension(file, "time", COUNT, unlimited=True)
        scales = [time, dimension(file, "lat", LAT), dimension(file, "lon", LON)]
        packing = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-32768)}
        variable(file, "t2m", PACKED, scales, packing, compression="gzip", shuffle=True)
        variable(
            file, "u10", FLOATS, scales, {"_FillValue": np.float32(1e20), "missing_value": np.float32(1e20)}
        )
        variable(file, "label", LABELS, scales[:1])
        variable(file, "area", np.ones((LAT, LON)), scales[1:])
        file.create_dataset("crs", data=np.int32(0))
        change(file, scales)
    return str(path)


def read(source, runs=((0, 0, COUNT),)):
    with source.reader(source.scan(), 0) as reader:
        batches = list(reader.sequential(16))
        assert all(reader.batch(*run) for run in runs)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def unpacked():
    values = (PACKED.astype(np.float64) * 0.01 + 273.15).astype(np.float32)
    values[PACKED == -32768] = np.nan
    return values


def test_variables_over_the_unlimited_dimension_are_the_arrays(tmp_path):
    found = read(Shards(write(tmp_path / "a.nc")))
    assert set(found) == {"t2m", "u10", "label"}
    np.testing.assert_array_equal(found["t2m"], unpacked())
    expected = np.where(np.float32(1e20) == FLOATS, np.nan, FLOATS)
    np.testing.assert_array_equal(found["u10"], expected)
    assert found["t2m"].dtype == found["u10"].dtype == torch.float32
    np.testing.assert_array_equal(found["label"], LABELS)


def test_columns_rename_stack_and_reach_into_groups(tmp_path):
    def nest(file, scales):
        group = file.create_group("fields/wind")
        variable(group, "v10", FLOATS[::-1], scales, {"_FillValue": np.float32(1e20)})

    path = write(tmp_path / "a.nc", nest)
    columns = {"x": ["u10", "fields/wind/v10", "t2m"], "y": "label", "when": "time"}
    found = read(Shards(path, columns=columns))
    assert found["x"].shape == (COUNT, 3, LAT, LON) and found["when"].tolist() == list(range(COUNT))
    np.testing.assert_array_equal(found["x"][:, 2], unpacked())
    expected = np.where(np.float32(1e20) == FLOATS, np.nan, FLOATS)
    np.testing.assert_array_equal(found["x"][:, 0], expected)
    np.testing.assert_array_equal(found["x"][:, 1], expected[::-1])
    np.testing.assert_array_equal(found["y"], LABELS)
    assert set(read(Shards(path, columns=["u10", "label"]))) == {"u10", "label"}
    assert repr(eval(repr(Shards(path, columns=columns)))) == repr(Shards(path, columns=columns))
    with pytest.raises(
        DataError, match=r"'label' is int32\[\] and 't2m' is float32\[4, 6\], which cannot be stacked"
    ):
        Shards(path, columns={"x": ["label", "t2m"]}).scan()
    with pytest.raises(DataError, match="has no dataset 'none'"):
        Shards(path, columns={"x": "none"}).scan()
    for wrong in ({"x": []}, {"x": 3}, "x", {"x": [3]}):
        with pytest.raises(UsageError, match="columns is a dict such as"):
            Shards(path, columns=wrong)
    with pytest.raises(UsageError, match="arrays and columns both"):
        Shards(path, arrays=("t2m",), columns={"x": "t2m"})


def test_several_first_dimensions_have_to_be_chosen_from(tmp_path):
    def limited(file, scales):
        station = dimension(file, "station", 5, unlimited=True)
        variable(file, "height", np.ones(5, np.float32), [station], chunks=(5,))

    path = write(tmp_path / "a.nc", limited)
    text = r"several first dimensions \(lat: area; station: height; time: label, t2m, u10\); name those"
    with pytest.raises(DataError, match=text):
        Shards(path).scan()
    assert set(read(Shards(path, arrays=("t2m", "label")))) == {"t2m", "label"}
    assert Shards(path, arrays=("height",)).scan().num_samples == 5


def test_integers_without_a_missing_value_of_their_own_are_refused_by_name(tmp_path):
    def whole(file, scales):
        counts = LABELS.copy()
        counts[20] = -1
        variable(file, "count", counts, scales[:1], {"_FillValue": np.int32(-1)})
        unsigned = (LABELS - 4).astype(np.int8)
        variable(file, "flag", unsigned, scales[:1], {"_Unsigned": "true"})
        fills = {"_FillValue": np.int8(-4), "missing_value": 1e20}  # the second is none of the type's values
        variable(file, "hole", unsigned, scales[:1], {"_Unsigned": "true", "scale_factor": 1.0} | fills)
        variable(file, "many", LABELS, scales[:1], {"scale_factor": 0.5, "missing_value": 1e20})
        variable(
            file,
            "default",
            np.full(COUNT, 9.969209968386869e36, np.float32),
            scales[:1],
            fillvalue=9.969209968386869e36,
        )

    path = write(tmp_path / "a.nc", whole)
    with pytest.raises(
        DataError, match=r"dataset 'count', chunk 0 .*: sample 20 has a missing value.*int32 has none"
    ):
        read(Shards(path, arrays=("count",)))
    found = read(Shards(path, arrays=("flag", "hole", "many", "default")))
    np.testing.assert_array_equal(found["hole"].isnan(), LABELS == 0)
    np.testing.assert_array_equal(found["flag"], (LABELS - 4).astype(np.int8).view(np.uint8))
    assert found["many"].dtype == torch.float64 and found["many"].tolist() == (LABELS * 0.5).tolist()
    assert found["default"].isnan().all()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("scale_factor", "high", "attribute scale_factor of variable 't2m' is"),
        ("add_offset", [1.0, 2.0], "has 2 values of add_offset, expected one"),
        ("_FillValue", np.zeros(100), r"_FillValue of variable 't2m' is float64\[100\]"),
    ],
)
def test_attributes_that_are_no_numbers_are_refused(tmp_path, name, value, text):
    def spoil(file, scales):
        file["t2m"].attrs[name] = value

    with pytest.raises(DataError, match=text):
        Shards(write(tmp_path / "a.nc", spoil)).scan()


def test_several_files_are_one_source(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.nc")
    source = Shards(f"{tmp_path}/*.nc", window_chunks=2)
    assert source.scan().num_samples == 2 * COUNT
    found = read(source)
    np.testing.assert_array_equal(found["label"], np.tile(LABELS, 2))


def test_a_plain_file_is_read_as_it_is(tmp_path):
    """Its attributes are its own affair, and what differs in length has to be chosen from."""
    path = tmp_path / "plain.h5"
    with h5py.File(path, "w") as file:
        file["a"], file["b"] = FLOATS, LABELS
        file["a"].attrs["scale_factor"] = 7.0
        file["deep/inside/z"] = LABELS * 2
    found = read(Shards(str(path), columns={"x": "a", "z": "deep/inside/z", "pair": ["b", "deep/inside/z"]}))
    np.testing.assert_array_equal(found["x"], FLOATS)
    np.testing.assert_array_equal(found["pair"], np.stack([LABELS, LABELS * 2], 1))
    with h5py.File(path, "a") as file:
        file["short"] = np.ones(3)
    with pytest.raises(DataError, match="differ in length.*name those that are meant: Shards.*columns="):
        Shards(str(path)).scan()
