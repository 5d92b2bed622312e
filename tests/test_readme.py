"""The README does what it says: its diff is short and runs, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

import pytest

from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def the_diff() -> list[str]:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    return diff.splitlines()


def test_adoption_is_a_diff_of_at_most_eight_lines():
    changed = [line for line in the_diff() if line[:1] in "+-" and line[1:].strip()]
    assert 0 < len(changed) <= 8


@pytest.mark.parametrize("strategy", ["mt.Async(servers=1)", "mt.AllReduce()"])
def test_the_diff_runs(tmp_path, strategy):
    after = "\n".join(line[1:] for line in the_diff() if not line.startswith("-")) + "\n"
    assert "mt.Async(servers=1)" in after
    run = run_ranks(3 if "Async" in strategy else 2, after.replace("mt.Async(servers=1)", strategy)).check()
    accuracies = re.findall(r"accuracy (0\.\d+)", run.stdout)
    assert len(accuracies) == 2
    assert len(set(accuracies)) == 1  # after finish() every worker holds the same model
    assert (
        float(accuracies[0]) >= 0.6
    )  # it trains (0.1 is chance); how far, asynchronously, hangs on who is held up


def test_before_the_diff_the_script_runs_alone(tmp_path, capsys):
    before = "\n".join(line[1:] for line in the_diff() if not line.startswith("+"))
    exec(compile(before, "before", "exec"), {})
    assert float(re.search(r"accuracy (0\.\d+)", capsys.readouterr().out).group(1)) >= 0.85


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        path, _, heading = link.partition("#")
        assert link.startswith("https://") or (ROOT / path).exists(), link
        assert not heading or heading in anchors(ROOT / path), link


def anchors(page: Path) -> list[str]:
    """What the headings of a page are linked by: small letters, digits and hyphens."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings]


def test_every_file_and_test_it_names_exists():
    for name in re.findall(r"`((?:tests|mpitrain|jobs|benchmarks)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name


def test_its_commands_parse():
    """Every `mpitrain ...` line of a shell block is accepted by the parser."""
    from mpitrain.cli.main import parse

    lines = [
        line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()
    ]
    commands = [re.sub(r"\s+#.*", "", line).split("mpitrain ", 1)[1] for line in lines if "mpitrain " in line]
    assert len(commands) >= 8
    import shlex

    for command in commands:
        parse(shlex.split(command))


def test_every_strategy_and_damping_is_in_the_readme_and_in_the_help(capsys):
    import mpitrain.strategies  # noqa: F401 - registers them
    from mpitrain.cli.main import parse
    from mpitrain.values import names

    with pytest.raises(SystemExit):
        parse(["train", "--help"])
    told = capsys.readouterr().out
    for name in names("strategy") + [name for name in names("damping") if name != "keep"]:
        assert f"`{name}(" in README, name
        assert f"{name}(" in told, name
