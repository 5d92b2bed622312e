"""`mpitrain completion`: what shells complete on a line."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from mpitrain.cli import main as cli
from tests.cli.test_cli import COMMANDS

# a line up to the cursor, some of what completes its last word, and what does not
LINES = [
    ("mpitrain tr", ["train"], ["runs"]),
    ("mpitrain data un", ["unstage"], ["info"]),
    ("mpitrain slurm render mult", ["multi-node"], ["tolerant"]),
    ("mpitrain launch -n 4 tr", ["train"], ["launch"]),
    ("mpitrain launch --host-args data train --cl", ["--clip-norm", "--clip-value"], ["--chunk-samples"]),
    ("mpitrain launch -n 4 data pack --im", ["--image-size"], ["--init"]),
    ("mpitrain train job.py --precision fl", ["float32", "float16"], ["bfloat16"]),
    ("mpitrain train --strategy so", ["softsync"], ["allreduce"]),
    ("mpitrain train mi", ["mine/", "mine.py"], ["other.py"]),
    ("mpitrain slurm status mi", ["mine/"], ["mine.py"]),
    ("mpitrain completion ", ["bash", "zsh", "fish"], ["train"]),
]
BASH = """\
source {script}
complete -p mpitrain
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"
    [[ $line != *" " ]] || COMP_WORDS+=("")
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _mpitrain
    for word in "${{COMPREPLY[@]}}"; do
        [[ ! -d $word ]] || word+=/ # as the shell itself shows a folder
        printf '%s ' "$word"
    done
    echo
done
"""
# zsh completes at a terminal only: here it answers what its completion asks for
ZSH = """\
compdef() {{ print COMPDEF "$@" }}
source {script}
while IFS= read -r line; do
    before=(${{=line}})
    [[ $line == *" " ]] && current= || {{ current=$before[-1]; before[-1]=() }}
    for word in $(_mpitrain_answer "$current" $before); do
        case $word in
            @files) print -rn -- $current*(NM) "" ;; # a folder with its slash
            @folders) print -rn -- $current*(N/M) "" ;;
            $current*) print -rn -- "$word " ;;
        esac
    done
    print
done
"""
FISH = """\
source {script}
complete -c mpitrain | head -1
while read -l line
    string join ' ' -- (complete -C "$line")
end
"""


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = folder / f"completion.{shell}"
    assert cli.main(["completion", shell]) == 0
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(("shell", "program"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)])
def test_a_shell_completes_lines(
    shell: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}: apt-get install {shell}")
    path = script(shell, tmp_path, capsys)
    (tmp_path / "mine").mkdir()
    for name in ("mine.py", "other.py"):
        (tmp_path / name).touch()
    typed = "".join(f"{line}\n" for line, _, _ in LINES)
    command = [shell, *(["-f"] * (shell == "zsh")), "-c", program.format(script=shlex.quote(str(path)))]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    registered, *answers = done.stdout.splitlines()
    assert "mpitrain" in registered, done.stderr
    assert len(answers) == len(LINES), done.stderr
    for (line, right, wrong), answer in zip(LINES, answers):
        found = answer.split()
        assert set(right) <= set(found) and not set(wrong) & set(found), (line, found)


def test_every_option_of_every_command_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = script("bash", tmp_path, capsys).read_text().splitlines()
    for words in COMMANDS[1:]:
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        told = re.findall(r"^  (?:-\w, )?(--?[a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)
        (known,) = (line for line in lines if line.strip().startswith(f"'options {' '.join(words)}')"))
        assert "--help" in told
        assert set(told) <= set(known.split("'")[3].split()), words
