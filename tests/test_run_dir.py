"""The directory of a run: what stands in its files, and that they stand there whole."""

import json
import pathlib

import pytest
import tensorflow as tf

from trainer import run_dir
from trainer.config import Config

CONFIG = Config(model_dir="somewhere", dataset="digits")


def _provenance(*argv: str) -> dict:
    return run_dir.provenance(
        ["main.py", *argv],
        devices="CPU",
        data="digits",
        step=0,
        origins={"flags": {"seed": "1"}},
        platform_ids={},
        secrets=["alert_url"],
        redact=lambda text: text.replace("?token=abc", ""),
    )


def test_every_start_is_in_the_provenance(tmp_path: pathlib.Path) -> None:
    folder = run_dir.RunDir(str(tmp_path / "new" / "run"))
    folder.start(CONFIG, _provenance("--seed=1"))
    folder.start(CONFIG, _provenance("--seed=1", "--allow_config_change"))
    starts = json.loads((tmp_path / "new/run/provenance.json").read_text())["starts"]
    assert [start["command"] for start in starts] == [
        ["main.py", "--seed=1"],
        ["main.py", "--seed=1", "--allow_config_change"],
    ]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--alert_url=https://hooks.example/T0/SECRET", "--seed=1"], ["--alert_url=...", "--seed=1"]),
        (["--alert_url", "https://hooks.example/T0/SECRET", "--seed=1"], ["--alert_url", "...", "--seed=1"]),
        (["-alert_url=SECRET"], ["-alert_url=..."]),
        (["--data_dir=https://host/x?token=abc"], ["--data_dir=https://host/x"]),
    ],
)
def test_secrets_do_not_reach_the_provenance(given: list[str], kept: list[str]) -> None:
    assert _provenance(*given)["command"] == ["main.py", *kept]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_dir.RunDir(str(tmp_path))
    folder.replace("file", "old")

    def dies(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tf.io.gfile, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        folder.replace("file", "new")
    assert folder.read("file") == "old"
    monkeypatch.undo()
    folder.replace("file", "new")
    assert folder.read("file") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_removed_directory_is_only_made_by_write(tmp_path: pathlib.Path) -> None:
    folder = run_dir.RunDir(str(tmp_path / "run"))
    with pytest.raises(tf.errors.NotFoundError, match="No such file or directory"):
        folder.replace("file", "text")
    assert not (tmp_path / "run").exists()
    assert folder.read("file") is None
    folder.write("file", "text")
    assert folder.read("file") == "text"


def test_looking_whether_it_can_be_written_leaves_nothing_and_takes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_dir.RunDir(str(tmp_path / "runs" / "1"))
    folder.check_writable()
    assert list(tmp_path.iterdir()) == []
    write = folder._write

    def write_beside_another_run(name: str, text: str) -> None:
        write(name, text)
        (tmp_path / "runs" / "1" / "status.json").write_text("{}")  # which begins at this moment

    monkeypatch.setattr(folder, "_write", write_beside_another_run)
    folder.check_writable()
    assert [path.name for path in (tmp_path / "runs" / "1").iterdir()] == ["status.json"]
