"""The page in a real browser: on a phone and a desk, light and dark, under a finger, without a script."""

import json
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.report import made
from tests.report.chrome import Chrome
from trainer.report import one, several
from trainer.report.left import look

PHONE, DESK = 390, 1280
RESULTS = ["state", "learning", "speed", "time", "alerts", "predictions", "worst"]
SECTIONS = {
    "one": [*RESULTS, "options", "provenance", "checkpoints"],
    "several": ["results", "learning", "speed", "time", "options"],
}
READOUT = "document.querySelector('figure.chart .keys').textContent"


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with Chrome(tmp_path_factory.mktemp("chrome")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """URLs of the page of one run, and of three."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [look(str(made.run(folder / f"run-{index}", seed=index))) for index in range(3)]
    (folder / "one.html").write_text(one.page(runs[0]))
    (folder / "several.html").write_text(several.page(runs, title="Runs"))
    return {name: (folder / f"{name}.html").as_uri() for name in ("one", "several")}


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["one", "several"])
def test_it_opens_without_a_word_of_complaint_and_fits(chrome: Chrome, pages: dict, name: str, width: int) -> None:
    chrome.open(pages[name], width=width)
    assert chrome.complaints() == []
    assert set(chrome.requests()) <= {"file", "data"} and chrome.requests()["file"] == 1
    assert chrome.run("document.title") != "evil"
    assert chrome.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    found = chrome.run("[...document.querySelectorAll('section')].filter((s) => s.offsetHeight > 60).map((s) => s.id)")
    assert found == SECTIONS[name]
    assert chrome.run("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    least = chrome.run(
        "Math.min(...[...document.querySelectorAll('.plot.linear text')].map((t) => t.getBoundingClientRect().height))"
    )
    assert least > 9, "the numbers of the axes can be read"


def test_long_names_fit_a_phone_and_leave_room_for_values(chrome: Chrome, tmp_path: pathlib.Path) -> None:
    runs = [look(str(made.run(tmp_path / f"{'long_name_' * 9}{index}", seed=index))) for index in range(2)]
    (tmp_path / "long.html").write_text(several.page(runs, title="Runs"))
    chrome.open((tmp_path / "long.html").as_uri(), width=PHONE)
    assert chrome.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    heights = chrome.run("[...document.querySelectorAll('.keys b')].map((value) => value.offsetHeight)")
    assert max(heights) < 30, "a value stands on one line"


def test_what_is_written_to_the_left_turns_nothing_else_round(chrome: Chrome, tmp_path: pathlib.Path) -> None:
    path = made.run(tmp_path / "run")
    text = (path / "examples.json").read_text()
    (path / "examples.json").write_text(text.replace('"airplane"', json.dumps("مطار")).replace('"cat"', '"قط"'))
    (tmp_path / "one.html").write_text(one.page(look(str(path))))
    chrome.open((tmp_path / "one.html").as_uri(), width=DESK)
    box = "getBoundingClientRect()"
    script = f"""(() => {{
        const predicted = document.querySelector('.worst b'), share = document.createRange();
        share.setStart(predicted.nextSibling, 1);
        share.setEnd(predicted.nextSibling, 6);
        return [predicted.{box}.right, share.{box}.left, share.toString()];
    }})()"""
    end, begin, share = chrome.run(script)
    assert end < begin and share == "(97.0"


def test_values_show_under_the_finger_and_by_the_keys(chrome: Chrome, pages: dict) -> None:
    chrome.open(pages["one"], width=PHONE)
    at_rest = chrome.run(READOUT)
    chrome.run("document.querySelector('svg.plot').scrollIntoView({block: 'center'})")
    box = chrome.run("document.querySelector('svg.plot').getBoundingClientRect().toJSON()")
    middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    chrome.call("Input.dispatchMouseEvent", type="mouseMoved", **middle)
    step = chrome.run("document.querySelector('.at').textContent")
    assert step.startswith("at step 1,") and step.endswith("0")
    records = {record["step"]: record for record in made.records()}
    shown = chrome.run("document.querySelector('[data-curve]').textContent")
    at = records[int(step.removeprefix("at step ").replace(",", ""))]
    assert float(shown) == pytest.approx(at["train/loss"], rel=1e-3)
    assert re.search(r"eval 0.\d+ \(step 1,[02]00\)", chrome.run(READOUT)), "the nearest one, and which that is"
    assert chrome.run("document.querySelectorAll('.cursor.shown').length") == 2
    chrome.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert chrome.run(READOUT) == at_rest

    chrome.run("document.querySelector('svg.plot').focus()")
    for _ in range(2):
        chrome.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
    assert chrome.run("document.querySelector('.at').textContent") == f"at step {made.STEPS - 2 * made.EVERY:,}"
    assert chrome.complaints() == []


def test_the_loss_can_be_logarithmic(chrome: Chrome, pages: dict) -> None:
    chrome.open(pages["one"], width=DESK)
    seen = "[...document.querySelectorAll('figure.chart')][0].querySelectorAll('svg.plot')"
    shown = f"[...{seen}].map((plot) => [plot.classList[1], plot.getBoundingClientRect().height > 0])"
    assert chrome.run(shown) == [["linear", True], ["logarithmic", False]]
    chrome.run("document.querySelector('.switch').click()")
    assert chrome.run(shown) == [["linear", False], ["logarithmic", True]]


def test_light_and_dark(chrome: Chrome, pages: dict) -> None:
    looks = {}
    for scheme in ("light", "dark"):
        chrome.open(pages["one"], width=PHONE, media={"prefers-color-scheme": scheme})
        of = "getComputedStyle(document.querySelector('%s')).%s"
        looks[scheme] = [chrome.run(of % ("body", "backgroundColor")), chrome.run(of % (".line", "stroke"))]
    assert looks["light"][0] == "rgb(255, 255, 255)" and looks["dark"][0] == "rgb(13, 17, 23)"
    assert looks["light"][1] != looks["dark"][1]


def test_without_a_script_all_is_there(chrome: Chrome, pages: dict) -> None:
    chrome.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chrome.open(pages["one"], width=PHONE)
        root = chrome.call("DOM.getDocument")["root"]["nodeId"]
        lines = chrome.call("DOM.querySelectorAll", nodeId=root, selector="svg.plot.linear path.line")["nodeIds"]
        assert len(lines) == 11, "curves of eight charts, two of them twice, and a cross"
    finally:
        chrome.call("Emulation.setScriptExecutionDisabled", value=False)


def test_a_policy_that_is_broken_is_noticed(chrome: Chrome, pages: dict, tmp_path: pathlib.Path) -> None:
    """What the other tests rely on: that complaints are heard."""
    page = pathlib.Path(pages["one"].removeprefix("file://")).read_text()
    (tmp_path / "bad.html").write_text(page.replace("</body>", "<script>document.title='evil'</script></body>"))
    chrome.open((tmp_path / "bad.html").as_uri(), width=DESK)
    assert any("Content Security Policy" in complaint for complaint in chrome.complaints())
    assert chrome.run("document.title") != "evil"
