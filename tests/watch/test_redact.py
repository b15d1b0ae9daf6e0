"""Nothing secret in what is written down, and everything that helps."""

import pytest

from trainer import redact
from trainer.errors import ConfigError

SLACK = "https://hooks.slack.com/services/T00/B00/SECRET"
KEPT = [
    "gs://bucket/run/checkpoints/step_100",
    "grpc://10.0.0.1:8470",
    "see https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice.",
    "https://github.com/keras-team/keras/issues/19246",
    "http://127.0.0.1:6006/",
    "http://tensorboard:6006",
    "alert_url must be the http:// or https:// URL of a webhook",
    "Config(alert_url=None, stall_secs=600.0)",
    '{"alert_url": null, "stall_secs": 600}',
    "--log_format=json",
]
REDACTED = [
    (SLACK, "https://hooks.slack.com/..."),
    (f"['{SLACK}', 3]", "['https://hooks.slack.com/...', 3]"),
    (f"POST {SLACK}: HTTP status 500.", "POST https://hooks.slack.com/...: HTTP status 500."),
    (f"({SLACK}).", "(https://hooks.slack.com/...)."),
    (
        "https://storage.googleapis.com/bucket/a%2Fb?uploadType=resumable&upload_id=SECRET failed",
        "https://storage.googleapis.com/bucket/a%2Fb?... failed",
    ),
    ("https://storage.googleapis.com/b/o#access_token=SECRET", "https://storage.googleapis.com/b/o?..."),
    ("https://user:SECRET@example.com", "https://...@example.com"),
    ("http://SECRET@proxy:3128/", "http://...@proxy:3128/"),
    ("HTTPS://Example.com:8443/hook/SECRET?x=1", "HTTPS://Example.com:8443/..."),
    ("https://example.com?token=SECRET", "https://example.com?..."),
    ("https://example.com/'SECRET", "https://example.com/..."),
    (f"--alert_url={SLACK} --tpu=x", "--alert_url=https://hooks.slack.com/... --tpu=x"),
    (f"--alert_url {SLACK}", "--alert_url https://hooks.slack.com/..."),
    ("--alert_url=https://u:SECRET@chat.googleapis.com/v1/SECRET", "--alert_url=https://chat.googleapis.com/..."),
    ("--alert_url=hooks.slack.com/services/SECRET", "--alert_url=..."),
    ("--alert_url=secret", "--alert_url=..."),
    (f'{{"alert_url": "{SLACK}", "seed": 1}}', '{"alert_url": "https://hooks.slack.com/...", "seed": 1}'),
    (f'alert_url = "{SLACK}"\nseed = 1', 'alert_url = "https://hooks.slack.com/..."\nseed = 1'),
    (f"Config(alert_url='{SLACK}', seed=1)", "Config(alert_url='https://hooks.slack.com/...', seed=1)"),
]


@pytest.mark.parametrize("text", KEPT)
def test_what_is_not_secret_stays(text):
    assert redact.redact(text) == text


@pytest.mark.parametrize(("text", "expected"), REDACTED)
def test_what_may_be_secret_goes_and_the_rest_stays(text, expected):
    assert redact.redact(text) == expected
    assert redact.redact(expected) == expected


@pytest.mark.parametrize("url", [SLACK, "http://127.0.0.1:8080", "https://user:pw@[::1]:9/x?y"])
def test_a_webhook_is_accepted(url):
    redact.check_alert_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.slack.com/SECRET",
        "ftp://h/SECRET",
        "https:///SECRET",
        "https://h:SECRET/",
        "http://h/a SECRET",
        "gs://h",
    ],
)
def test_what_is_no_webhook_is_refused_without_being_shown(url):
    with pytest.raises(ConfigError, match="alert_url must be the http:// or https:// URL of a webhook") as caught:
        redact.check_alert_url(url)
    assert "SECRET" not in str(caught.value)
