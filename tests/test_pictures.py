"""The pictures of the documentation: of every strategy one, as runs in virtual time have it, and readable."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs import characters, drawing, family_pictures
from docs.families import BY_KEY, FAMILIES, GRADIENT, PARAMETERS, UPDATE
from mpitrain.values import names

PICTURES = family_pictures.made()
SVG = "{http://www.w3.org/2000/svg}"


def test_every_strategy_is_of_one_family() -> None:
    import mpitrain.strategies  # noqa: F401 - registers them

    assert sorted(name for family in FAMILIES for name in family.strategies) == sorted(names("strategy"))


def roles(ranks: str) -> str:
    """Peers are workers of a family without servers."""
    return ranks.split(" ")[0].replace("peer", "worker")


CARRIES = {"Push": GRADIENT, "Reply": PARAMETERS, "Update": UPDATE}


@pytest.mark.parametrize("strategy", characters.TIMELINES)
def test_arrows_are_the_messages_of_a_run(strategy: str) -> None:
    """What carries numbers; the rest says that somebody waits, is done or leaves. An average among all is drawn as the
    ring of ranks in which it is made, and traced as a span of each."""
    traced = characters.timeline(strategy)
    lanes = [roles(lane["name"]) for lane in traced["lanes"]]
    (family,) = (family for family in FAMILIES if strategy.partition("(")[0] in family.strategies)
    drawn = {(arrow.what, roles(arrow.source), roles(arrow.target)) for arrow in family.arrows}
    sent = {(CARRIES[kind], lanes[a], lanes[b]) for kind, a, b, *_ in traced["messages"] if kind in CARRIES}
    averaging = {a for kind, a, b, *_ in traced["messages"] if (kind, b) == ("allreduce", -1)}
    if averaging:
        assert not sent and averaging == set(range(len(lanes))) and {a for _, a, _ in drawn} == set(lanes)
    else:
        assert sent == drawn
    assert characters.recorded()["timelines"][strategy] == characters.rounded(traced)


@pytest.mark.extended
@pytest.mark.parametrize("key", [key for key in characters.RUNS if key != "losses"])
def test_curves_are_those_of_runs(key: str) -> None:
    assert characters.recorded()["runs"][key] == characters.rounded(characters.RUNS[key]())


def test_peers_of_a_ring_send_to_their_neighbours_alone() -> None:
    ring = characters.timeline('decentralized(topology="ring")', workers=4)
    assert {(a, b) for kind, a, b, *_ in ring["messages"] if kind == "Update"} == {
        (a, b % 4) for a in range(4) for b in (a - 1, a + 1)
    }
    peers = [rank for row in BY_KEY["decentralized"].rows for rank in row]
    arrows = [arrow for arrow in BY_KEY["decentralized"].arrows if arrow.there_too]
    assert all(sum(peer in (arrow.source, arrow.target) for arrow in arrows) == 2 for peer in peers)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_fits(path: Path) -> None:
    """A letter is taken to be 0.56 of its height wide, as letters are on average."""
    top = ElementTree.fromstring(PICTURES[path])
    high = float(top.attrib["viewBox"].split(" ")[3])
    assert len(top.findtext(f"{SVG}title") or "") > 10 and len(top.findtext(f"{SVG}desc") or "") > 10
    assert top.attrib["font-size"] == "14" and float(top.attrib["viewBox"].split(" ")[2]) <= 480
    for text in top.iter(f"{SVG}text"):
        x, y, wide = float(text.attrib["x"]), float(text.attrib["y"]), len(text.text or "") * 14 * 0.56
        left = x - {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]] * wide
        assert left >= 0 and left + wide <= drawing.WIDTH and 10 <= y <= high, text.text
    for path_ in top.iter(f"{SVG}path"):
        numbers = [float(one) for one in re.findall(r"-?[\d.]+", path_.attrib["d"])]
        assert all(0 <= x <= drawing.WIDTH for x in numbers[::2])
        assert all(0 <= y <= high for y in numbers[1::2])


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colours", [drawing.LIGHT, drawing.DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_paper(colours: tuple[str, ...]) -> None:
    """WCAG 2: 4.5 for text; 3 for what else one has to see."""
    shade = {name: luminance(colour) + 0.05 for name, colour in zip(drawing.NAMES, colours, strict=True)}
    for name in ("ink", "faint", "c1", "c2", "c3", "c4", "c5"):
        light, dark = sorted((shade[name], shade["paper"]), reverse=True)
        assert light / dark >= 4.5, name


def test_the_site_has_the_colours_of_the_drawings() -> None:
    sheet = (Path(drawing.__file__).parent / "site" / "static" / "site.css").read_text(encoding="utf-8")
    for name, light, dark in zip(drawing.NAMES, drawing.LIGHT, drawing.DARK, strict=True):
        assert name == "paper" or (sheet.count(f"--{name}: {light};"), sheet.count(f"--{name}: {dark};")) == (
            1,
            2,
        )
