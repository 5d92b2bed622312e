"""The simulated accelerator of `simulated.cpp`: torch's private device under the name "sim", two of them a process.

`load()` has torch know it, `build()` makes the library, once for each torch and source: below `build/`, where a fresh
checkout has none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

NAME, NUM_DEVICES = "sim", 2
SOURCE = Path(__file__).parent / "simulated.cpp"
FOLDER = Path(__file__).parents[2] / "build" / "simulated"
LATE_MS = 200  # after which a stream does what nobody waits for


def why_not() -> str:
    """Why it cannot be had here; "" where it can."""
    return "" if compiler() else "no C++ compiler, for the simulated accelerator"


def compiler() -> str | None:
    """The one that is asked for, or is there."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def build() -> Path:
    """The library; two processes that come at once make the same."""
    import torch
    from torch.utils import cpp_extension

    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    library = FOLDER / f"sim-{torch.__version__}-{key}.so"
    if library.exists():
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")
    command = [str(compiler()), "-std=c++20", "-O0", "-w", "-fPIC", "-shared", str(SOURCE), "-o", str(made)]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True, timeout=300)
    made.replace(library)
    return library


def load(late_ms: int = LATE_MS) -> ctypes.CDLL:
    """Have torch know the device; returns the library. For a process that has loaded it, no more than that."""
    import torch

    if hasattr(torch, NAME):
        return ctypes.CDLL(str(build()))
    library = ctypes.CDLL(str(build()))
    library.simulated_start(late_ms)
    library.simulated_name_faults()
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = _module(library)
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    module.default_generators = [torch.Generator(torch.device(NAME, index)) for index in range(NUM_DEVICES)]
    return library


def be_the_same_everywhere() -> None:
    """Have the host's products of matrices not depend on where in memory they lie. MKL reads that when it is first
    used, and a rank that was forked from a process that has imported torch has not used it."""
    import torch

    os.environ["MKL_CBWR"] = "COMPATIBLE"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    asked = getattr(library, "mkl_serv_cbwr_get", None)  # some builds have another library than MKL
    assert asked is None or asked(-1) == 3, "MKL has been used before it was told"


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """What torch expects of `torch.sim`, and what `torch.cuda` has that this package uses."""
    import torch

    def index_of(device: Any) -> int:
        if device is None:
            return int(library.simulated_current_device())
        return device if isinstance(device, int) else torch.device(device).index or 0

    module = types.ModuleType(f"torch.{NAME}")
    contents = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: NUM_DEVICES,
        "current_device": library.simulated_current_device,
        "set_device": lambda device: library.simulated_set_device(index_of(device)),
        "get_device_name": lambda device=None: f"simulated {index_of(device)}",
        "synchronize": lambda device=None: torch.accelerator.synchronize(
            torch.device(NAME, index_of(device))
        ),
        "current_stream": lambda device=None: torch.accelerator.current_stream(
            torch.device(NAME, index_of(device))
        ),
        "stream": lambda stream: stream,
        "device": lambda index: torch.accelerator.device_index(index_of(index)),
        "Stream": torch.Stream,
        "Event": torch.Event,
        "get_rng_state": lambda device=NAME: module.default_generators[index_of(device)].get_state(),
        "set_rng_state": lambda state, device=NAME: module.default_generators[index_of(device)].set_state(
            state
        ),
        "manual_seed": lambda seed: module.default_generators[index_of(None)].manual_seed(seed),
        "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in module.default_generators],
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, value in contents.items():
        setattr(module, name, value)
    return module
