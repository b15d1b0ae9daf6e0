"""What is done on the TPU VM over ssh: the code, the environment, the run. `scripts/on_tpu_vm` does it there."""

import dataclasses
import pathlib
import re
import shlex
import tempfile

from scripts.launchers.actions import Actions
from scripts.launchers.job import Job
from scripts.launchers.tpu_vm.machine import Machine
from trainer.errors import RetryError

_CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
RUNNING, ABSENT = "running", "absent"
# Of the images whose workers serve a pod, and with which TensorFlow they do.
POD_RUNTIME = re.compile(r"tpu-vm-tf-(\d+\.\d+)\.\d+-pod(-pjrt)?")


@dataclasses.dataclass(frozen=True)
class Remote:
    """A run on a machine.

    code: archive of the checkout on gs://; None takes this checkout, as it is committed.
    env_file: file with variables for the run, such as TRAINER_ALERT_URL.
    """

    machine: Machine
    actions: Actions
    job: Job
    code: str | None
    env_file: str | None

    def install(self) -> None:
        """Brings code and packages there; what is there already stays."""
        name = self.machine.name
        archive = f"{name}.tar.gz"
        if self.code:
            fetch = f"gcloud storage cp {shlex.quote(self.code)} {archive} && "
        else:
            self.actions.note("The code: what is committed in this checkout, your own models too.")
            here = str(pathlib.Path(tempfile.gettempdir(), archive))
            self.actions.run(["git", "-C", str(_CHECKOUT), "archive", "--format=tar.gz", f"--output={here}", "HEAD"])
            self.actions.run(self.machine.scp(here, archive))
            fetch = ""
        self.actions.note("An environment of its own, with TensorFlow for TPUs; minutes the first time.")
        version = self._tensorflow_of_workers()
        install = shlex.join([self._program, "install", *([version] if version else [])])
        self.actions.run(self.machine.ssh(f"{fetch}mkdir -p {name} && tar -xzf {archive} -C {name} && {install}"))
        if self.env_file:
            self.actions.run(self.machine.scp(self.env_file, f"{name}/run.env"))

    def start(self) -> None:
        """Starts the run in the background, unless it runs."""
        words = [self._program, "start", *self.job.flags(**self.trainer_flags(self.machine))]
        if self.machine.is_pod:
            self.actions.note(
                "A pod is driven from worker 0, by the name of the TPU; the chips there are the workers'."
            )
            words = ["env", f"TPU_NAME={self.machine.name}", "TPU_LOAD_LIBRARY=0", *words]
        self.actions.run(self.machine.ssh(shlex.join(words)))

    def status(self) -> str | int:
        """`running`, `absent`, or the exit code of a run that has ended.

        Raises:
            RetryError: the VM cannot be reached.
        """
        command = self.machine.ssh(self.status_line)
        answer = self.actions.query(command)
        word, _, code = (answer or "").strip().partition(" ")
        if word in (RUNNING, ABSENT):
            return word
        if word == "exit" and code.isdecimal():
            return int(code)
        raise RetryError(f"the TPU VM does not tell how the run is. Received: {answer!r}")

    @property
    def status_line(self) -> str:
        """For a shell there; a VM without the code has no run either."""
        return f"[ ! -x {self._program} ] && echo {ABSENT} || {self._program} status"

    def logs(self, lines: int) -> list[str]:
        """Prints the end of the run's log."""
        return self.machine.ssh(f"{self._program} logs {lines}")

    @property
    def _program(self) -> str:
        return f"{self.machine.name}/scripts/on_tpu_vm"

    def _tensorflow_of_workers(self) -> str | None:
        runtime = POD_RUNTIME.fullmatch(self.machine.runtime_version)
        return runtime[1] if runtime else None

    @staticmethod
    def trainer_flags(machine: Machine) -> dict[str, str]:
        """Options of the trainer that say which TPU it trains on."""
        if not machine.is_pod:
            return {"tpu": "local"}
        place = {"tpu": machine.name, "tpu_zone": machine.zone}
        return place | ({"tpu_project": machine.project} if machine.project else {})
