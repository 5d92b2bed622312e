# What the scripts beside this one share: the command, that of .venv where none is found, a folder for the runs, digits.
set -eu
cd "$(dirname "$0")/../.."
command -v mpitrain >/dev/null || PATH=$PWD/.venv/bin:$PATH
python=$(dirname "$(command -v mpitrain)")/python
export PATH OMP_NUM_THREADS=1
RUNS=$(mktemp -d)
trap 'rm -rf "$RUNS"' EXIT
mpitrain data pack digits data/digits >/dev/null
told() { # RUN KEYS...: what its result.json says
    "$python" -c 'import json, sys
result = json.load(open(sys.argv[1] + "/result.json"))
print(sys.argv[1].split("/")[-1], {key: result[key] for key in sys.argv[2:]})' "$RUNS/$@"
}
