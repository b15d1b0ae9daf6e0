"""scripts/launchers/study.py: a study is read whole, or refused with all that is wrong with it."""

import pytest

from scripts.launchers import study
from trainer.errors import ConfigError

RUN = {"dataset": "digits", "model_dir": "runs/1"}
HEAD = '[study]\nmetric="accuracy"\ngoal="max"\ntrials=20\n'
GOOD = (
    HEAD
    + """parallel=2
[parameters.learning_rate]
type="double"
min=1e-4
max=1e-1
scale="log"
[parameters.learning_rate_batch_size]
type="integer"
min=1
max=100
[parameters.optimizer]
type="categorical"
values=["sgd", "adamw"]
[parameters.global_batch_size]
type="discrete"
values=[64, 32]
[parameters."model_options.dropout"]
type="discrete"
values=[0, 0.5]
"""
)


def load(tmp_path, text, values=RUN):
    (tmp_path / "study.toml").write_text(text)
    return study.load(str(tmp_path / "study.toml"), values)


def refusal(tmp_path, text, values=RUN):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, values)
    return str(caught.value)


def test_study_is_read(tmp_path):
    read = load(tmp_path, GOOD)
    assert (read.metric, read.goal, read.trials, read.parallel, read.algorithm) == (
        "accuracy",
        "max",
        20,
        2,
        "bayesian",
    )
    assert read.parameters == (
        study.Parameter("learning_rate", "double", min=1e-4, max=1e-1, scale="log"),
        study.Parameter("learning_rate_batch_size", "integer", min=1, max=100),
        study.Parameter("optimizer", "categorical", values=("sgd", "adamw")),
        study.Parameter("global_batch_size", "discrete", values=(32, 64)),
        study.Parameter("model_options.dropout", "discrete", values=(0, 0.5)),
    )


def test_all_mistakes_are_told_at_once(tmp_path):
    told = refusal(
        tmp_path,
        """[study]
metric=""
goal="maximise"
trials="many"
worker=3
[parameters.learning_rte]
type="double"
min=1
max=0
[parameters.model_dir]
type="categorical"
values=["a", "a"]
[parameters.clipnorm]
type="log"
[parameters.seed]
type="integer"
min=0.5
max=3
scale="log"
[more]
""",
    )
    for part in (
        "unknown table 'more'",
        "metric must be a text. Received: ''",
        "goal must be one of max, min. Received: 'maximise'",
        "trials must be a whole number. Received: 'many'",
        "unknown key 'worker'",
        "[parameters.learning_rte] the trainer has no such option; did you mean 'learning_rate'?",
        "[parameters.model_dir] no metric depends on this option",
        "[parameters.model_dir] values names one twice",
        "[parameters.clipnorm] type must be one of double, integer, categorical, discrete. Received: 'log'",
        "[parameters.seed] min must be a whole number. Received: 0.5",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a table [study] is needed"),
        (HEAD, "a table [parameters] is needed"),
        (HEAD + 'parallel=21\n[parameters.seed]\ntype="integer"\nmin=0\nmax=9', "parallel from 1 to trials"),
        (HEAD + '[parameters.seed]\ntype="integer"\nmin=9\nmax=0', "min must be below max. Received: 9 and 0"),
        (HEAD + '[parameters.seed]\ntype="integer"\nmin=0\nmax=9\nscale="log"', "above 0 on a log scale"),
        (HEAD + '[parameters.seed]\ntype="discrete"\nvalues=["1"]', "each entry a number. Received: ['1']"),
        (HEAD + '[parameters.seed]\ntype="discrete"\nvalues=[1]\nscale="log"', "unknown key 'scale' of type discrete"),
        (HEAD + '[parameters.model_options]\ntype="discrete"\nvalues=[1]', "model_options.NAME"),
        (
            HEAD + 'algorithm="grid"\n[parameters.decay_power]\ntype="double"\nmin=1\nmax=2',
            "a grid has no place for type double",
        ),
    ],
)
def test_study_that_makes_no_sense(tmp_path, text, told):
    assert told in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("parameter", "told"),
    [
        (
            '[parameters.learning_rate]\ntype="double"\nmin=0\nmax=1',
            "learning_rate=0 would be refused",
        ),
        (
            '[parameters.learning_rate_batch_size]\ntype="double"\nmin=1\nmax=1.5',
            "takes a whole number. Received: 1.5",
        ),
        ('[parameters.optimizer]\ntype="categorical"\nvalues=["sgd", "adem"]', "did you mean 'adam'"),
        (
            '[parameters."optimizer_options.momentum"]\ntype="double"\nmin=0.5\nmax=0.8',
            "adamw has no option 'momentum'",
        ),
        ('[parameters.optimizer_options]\ntype="discrete"\nvalues=[1]', "optimizer_options.NAME"),
        ('[parameters.warmup]\ntype="discrete"\nvalues=[5]', "warmup takes a text. Received: 5"),
    ],
)
def test_trials_that_the_trainer_would_refuse(tmp_path, parameter, told):
    assert told in refusal(tmp_path, HEAD + parameter)


def test_a_pair_that_the_trainer_would_refuse(tmp_path):
    momentum = '[parameters."optimizer_options.momentum"]\ntype="discrete"\nvalues=[0.9, 0.95]\n'
    optimizer = '[parameters.optimizer]\ntype="categorical"\nvalues=["sgd"{}]\n'
    load(tmp_path, HEAD + momentum + optimizer.format(""))  # the run's own optimizer, adamw, is in no trial
    told = refusal(tmp_path, HEAD + momentum + optimizer.format(', "adamw"'))
    assert "optimizer='adamw' would be refused: optimizer_options: adamw has no option 'momentum'" in told
