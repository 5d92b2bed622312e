"""mpitrain for Spack 1.0 and later: `spack repo add slurm/packaging/spack_repo/mpitrain; spack install py-mpitrain`."""

from spack.package import depends_on, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpitrain(PythonPackage):
    """Train PyTorch models over MPI: the synchronisation strategy is a value you swap."""

    homepage = "https://example.org/mpitrain"
    git = "https://example.org/mpitrain.git"  # where your copy is

    version("main", branch="main")
    version("0.2.0", tag="v0.2.0", preferred=True)

    variant("data", default=False, description="What prepares the example data")
    variant("tables", default=False, description="Pack CSV and Parquet files")
    variant("images", default=False, description="Pack folders of images")
    variant("plot", default=False, description="Draw figures in reports")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("mpi", type=("build", "run"))

    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-safetensors@0.4:", type=("build", "run"))
    depends_on("py-torch@2.8:", type=("build", "run"))

    depends_on("py-scikit-learn@1.3:", when="+data", type="run")
    depends_on("py-pyarrow@14.0:", when="+tables", type="run")
    depends_on("py-pillow@10.0:", when="+images", type="run")
    depends_on("py-matplotlib@3.8:", when="+plot", type="run")
