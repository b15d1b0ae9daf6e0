"""Sends specs by Google's own client to an endpoint, in an environment of its own with google-cloud-aiplatform.

    python vertex_sdk.py http://127.0.0.1:PORT DIR

Each DIR/NAME.json is the body of a CustomJob or of a HyperparameterTuningJob. Fields that the API does not have, and
values of another type, end it with an error. What the client sends is for the server to look at; enums are numbers
there, so their names and numbers are printed, as JSON.
"""

import json
import pathlib
import sys

from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform
from google.cloud.aiplatform_v1 import types

PARENT = "projects/my-project/locations/us-central1"
ENUMS = (
    types.AcceleratorType,
    types.Scheduling.Strategy,
    types.StudySpec.Algorithm,
    types.StudySpec.MetricSpec.GoalType,
    types.StudySpec.ParameterSpec.ScaleType,
)


def send(client, body: str) -> None:
    """By the client of the API itself."""
    if "studySpec" in json.loads(body):
        tuning = types.HyperparameterTuningJob.from_json(body, ignore_unknown_fields=False)
        client.create_hyperparameter_tuning_job(parent=PARENT, hyperparameter_tuning_job=tuning)
    else:
        job = types.CustomJob.from_json(body, ignore_unknown_fields=False)
        client.create_custom_job(parent=PARENT, custom_job=job)


def submit(body: str) -> None:
    """By the SDK's own `CustomJob`, which checks and fills more."""
    job = types.CustomJob.from_json(body, ignore_unknown_fields=False)
    spec = job.job_spec
    made = aiplatform.CustomJob(
        display_name=job.display_name,
        worker_pool_specs=list(spec.worker_pool_specs),
        base_output_dir=spec.base_output_directory.output_uri_prefix,
        labels=dict(job.labels),
        staging_bucket="gs://unused",
    )
    made.submit(
        service_account=spec.service_account,
        network=spec.network,
        timeout=int(spec.scheduling.timeout.total_seconds()),
        restart_job_on_worker_restart=spec.scheduling.restart_job_on_worker_restart,
        tensorboard=spec.tensorboard,
        scheduling_strategy=spec.scheduling.strategy,
    )


def main(endpoint: str, directory: str) -> None:
    """Sends every file; the one named full.json by both ways."""
    aiplatform.init(
        project="my-project",
        location="us-central1",
        credentials=AnonymousCredentials(),
        api_endpoint=endpoint,
        api_transport="rest",
    )
    client = aiplatform.gapic.JobServiceClient(
        credentials=AnonymousCredentials(), transport="rest", client_options={"api_endpoint": endpoint}
    )
    for path in sorted(pathlib.Path(directory).glob("*.json"), key=lambda path: path.stem):
        send(client, path.read_text())
        if path.stem == "full":
            submit(path.read_text())
    print(json.dumps({member.name: member.value for enum in ENUMS for member in enum}))


if __name__ == "__main__":
    main(*sys.argv[1:])
