"""Text without the secrets that URLs carry, for logs, config, provenance and reports. No TensorFlow.

What is kept of an http(s) URL:

| URL | becomes |
| --- | --- |
| https://storage.googleapis.com/b/o?upload_id=SECRET | https://storage.googleapis.com/b/o?... (the object helps) |
| https://hooks.slack.com/services/SECRET | https://hooks.slack.com/... |
| https://user:SECRET@example.com/ | https://...@example.com/ |
| --alert_url=SECRET | scheme and host of it, or `...` where it has none |

A path is kept on the hosts of `_PATHS_SAY_NOTHING_SECRET` only. gs:// and grpc:// addresses, which have no query, stay.
"""

import re
import urllib.parse

from trainer.errors import ConfigError

# Google's APIs take credentials in headers and queries; the others are the documentation that messages point to.
_PATHS_SAY_NOTHING_SECRET = ("googleapis.com", "google.com", "tensorflow.org", "keras.io", "github.com", "python.org")
_SCHEMES = ("http", "https")
_URL = re.compile(r"""https?://[^\s<>"]+""", re.IGNORECASE)
# What follows a URL in prose, in a list or in the repr of a string, rather than ending it.
_AFTERWARDS = ".,;:!?)]}'`"
# As a flag, as a field of JSON, TOML or YAML, as an environment variable, as an argument of Python.
_ALERT_URL = re.compile(r"""(alert_url["']?\s*[=:\s]\s*["']?)([^\s"'<>]+)""", re.IGNORECASE)
_NOT_SET = ("None", "null", "...", "")


def redact(text: str) -> str:
    """The text with what can be secret in its URLs replaced by `...`; redacting twice changes nothing more."""
    text = _ALERT_URL.sub(_without_alert_url, text)
    return _URL.sub(_without_secrets, text)


def check_alert_url(url: str) -> None:
    """Refuses what no JSON can be POSTed to.

    Raises:
        ConfigError: not http or https, or no host; shows no more of the value than `redact` would.
    """
    if _host_of(url) is None:
        raise ConfigError(
            "alert_url must be the http:// or https:// URL of a webhook, with a host. "
            f"Received: {_only_host(url)!r} (the rest is not shown, it may be secret)"
        )


def _without_alert_url(match: re.Match[str]) -> str:
    prefix, value = match.groups()
    plain_word = re.fullmatch(r"[a-z_]+", value) and prefix.rstrip("\"' ").lower().endswith("alert_url")
    if value.rstrip(",)}") in _NOT_SET or plain_word:  # unset, or prose about the option
        return match[0]
    return prefix + _only_host(value)


def _without_secrets(match: re.Match[str]) -> str:
    url = match[0].rstrip(_AFTERWARDS)
    after = match[0][len(url) :]
    if match[0].startswith("...", len(url)):  # what an earlier call has put there
        url, after = url + "...", after[3:]
    scheme, _, rest = url.partition("://")
    authority, path, query = _split(rest)
    userinfo, at, address = authority.rpartition("@")
    if path.strip("/") and not _tells_path(address):
        path, query = "/...", ""
    return f"{scheme}://{'...' if userinfo else ''}{at}{address}{path}{query and '?...'}{after}"


def _split(rest: str) -> tuple[str, str, str]:
    """Authority, path, and whatever follows a `?` or `#`."""
    matched = re.fullmatch(r"([^/?#]*)([^?#]*)(.*)", rest, re.DOTALL)
    return (matched[1], matched[2], matched[3]) if matched else (rest, "", "")


def _tells_path(address: str) -> bool:
    host = address.partition(":")[0].lower()
    return any(host == known or host.endswith(f".{known}") for known in _PATHS_SAY_NOTHING_SECRET)


def _only_host(url: str) -> str:
    """Scheme and host, `...` where there are none."""
    host = _host_of(url)
    scheme = url.partition("://")[0]
    return f"{scheme}://{host}/..." if host else "..."


def _host_of(url: str) -> str | None:
    """`host[:port]` of a URL that can be POSTed to."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port  # raises where it is no number
    except ValueError:
        return None
    if parts.scheme.lower() not in _SCHEMES or not parts.hostname or re.search(r"\s", url):
        return None
    return parts.hostname if port is None else f"{parts.hostname}:{port}"
