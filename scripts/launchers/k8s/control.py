"""kubectl's part of `scripts/launch k8s`: to apply what was written, and to look after it."""

import json

from scripts.launchers.actions import Actions
from scripts.launchers.k8s.manifests import INSTANCE
from scripts.launchers.k8s.settings import Settings

_ALL_PODS = "100"  # followed at once; kubectl refuses more than 5 otherwise
_ABOUT = {
    "suspend": "Pods get SIGTERM, save and end; of a CronJob the run that is under way goes on, and no other starts.",
    "resume": "New pods go on from the newest checkpoint; --deadline_hours count anew.",
    "status": "What there is of it.",
    "logs": "Of all pods, until they end; one that took another's place later is not among them.",
    "delete": "Pods get SIGTERM, save and end. Nothing below model_dir is touched.",
}


def start(settings: Settings, manifest: str, actions: Actions) -> None:
    """Writes the manifest, and applies it."""
    path = actions.write(f"{settings.name}.yaml", manifest)
    actions.run(_kubectl(settings, "apply", f"--filename={path}"))
    kinds = f"{settings.kind},pods"
    actions.note(
        "A Job cannot be changed: to start it again with other options, --action=delete it first.\n"
        "To look after it, give the command above with --action=suspend, resume, status, logs or delete; such as:"
    )
    actions.note(" ".join(_kubectl(settings, "get", kinds, f"--selector={INSTANCE}={settings.name}")))


def act(settings: Settings, actions: Actions) -> None:
    """Does what --action says."""
    actions.note(_ABOUT[settings.action])
    actions.run(_kubectl(settings, *_words(settings)))


def _words(settings: Settings) -> list[str]:
    selector = f"--selector={INSTANCE}={settings.name}"
    if settings.action in ("suspend", "resume"):
        change = json.dumps({"spec": {"suspend": settings.action == "suspend"}})
        return ["patch", settings.kind, settings.name, "--type=merge", f"--patch={change}"]
    if settings.action == "status":
        return ["get", f"{settings.kind},pods", selector]
    if settings.action == "logs":
        return ["logs", "--follow", "--prefix", "--tail=-1", f"--max-log-requests={_ALL_PODS}", selector]
    return ["delete", f"{settings.kind},configmaps", selector]


def _kubectl(settings: Settings, *words: str) -> list[str]:
    return ["kubectl", *([f"--namespace={settings.namespace}"] if settings.namespace else []), *words]
