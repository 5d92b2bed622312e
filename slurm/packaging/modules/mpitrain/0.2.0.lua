help([[
mpitrain: train PyTorch models over MPI.

    mpitrain --help
    mpitrain doctor --node        is this node fit to train on?
    mpitrain slurm site --help    the site file of the batch scripts
]])
whatis("Name: mpitrain")
whatis("Version: 0.2.0")
whatis("Description: train PyTorch models over MPI")

-- The environment it is installed in: python3 -m venv ROOT; ROOT/bin/pip install mpitrain
local root = os.getenv("MPITRAIN_ROOT") or pathJoin("/opt/mpitrain", myModuleVersion())
if not isDir(root) then
    LmodError("there is no environment " .. root .. ": set MPITRAIN_ROOT, or edit this file")
end

-- depends_on("openmpi/5")  -- the site's MPI, which mpi4py was built with

prepend_path("PATH", pathJoin(root, "bin"))
setenv("MPITRAIN_HOME", root)
setenv("HDF5_USE_FILE_LOCKING", "FALSE") -- parallel file systems often have no locks

-- The wheel of Open MPI finds its files by itself only under its own mpirun.
if isFile(pathJoin(root, "lib", "libmpi.so.40")) then
    setenv("OPAL_PREFIX", root)
    setenv("PMIX_PREFIX", root)
    setenv("PMIX_MCA_psec", "native")
    setenv("PMIX_MCA_gds", "hash")
end
