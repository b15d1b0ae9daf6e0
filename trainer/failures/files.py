"""Records, checkpoints, buckets. What stands in the dataset or in `model_dir` is told with its place before it comes
to this table: `trainer/inputs.py`, `trainer/storage.py`."""

from trainer.failures.row import Failure

FAILURES = (
    Failure(
        "local path on a remote worker",
        ("OpError",),
        r"File system scheme '\[local\]' not implemented",
        "a TPU worker on another machine was given a local path",
        "Put the data and --model_dir on gs://",
        "File system scheme '[local]' not implemented (file: '/content/data.tfrecord')\n"
        "\t [[{{node MultiDeviceIteratorGetNextFromShard}}]]",
        "tensorflow/tensorflow#36447, #32651; google-research/language#54",
    ),
    Failure(
        "unknown file system",
        ("OpError",),
        r"File system scheme '[\w.+-]+' not implemented",
        "TensorFlow does not know this kind of path",
        "Use a local path or gs://",
        "File system scheme 's3' not implemented (file: 's3://bucket/x')",
        "here",
    ),
    Failure(
        "bucket denies access",
        ("OpError",),
        r"does not have storage\.\w+\.\w+ access",
        "an account may not do in a bucket what the text below names",
        "Grant that account roles/storage.objectAdmin on the bucket; --mode=doctor tries all of them",
        'Error executing an HTTP request: HTTP response code 403 with body \'{ "error": { "code": 403, "message": '
        '"service-495559152420@cloud-tpu.iam.gserviceaccount.com does not have storage.objects.create access to '
        "bucketname/train/events.out.tfevents",
        "googlecolab/colabtools#1177; tensorflow/models#10828",
    ),
    Failure(
        "bucket out of reach",
        ("OpError",),
        r"libcurl code (5|6|7|28|35|52|56) ",
        "a request to Cloud Storage got no answer",
        "Mend the network, the proxy or the name server of this machine; --mode=doctor tries every bucket",
        "Error executing an HTTP request: libcurl code 6 meaning 'Could not resolve hostname', error details: Could "
        "not resolve host: www.googleapis.com when reading metadata of gs://bucket/data/digits/dataset_info.json",
        "here",
        retryable=True,
    ),
    Failure(
        "damaged record",
        ("DataLossError",),
        r"(corrupted|truncated) record at",
        "a record is damaged",
        "`python -m data.audit DIR` names file and record; --corrupt_records=skip --max_corrupt_records=N trains "
        "without up to N of them",
        "corrupted record at 3289898",
        "tensorflow/tensorflow#20835, #13463; here",
    ),
    Failure(
        "records of another schema",
        ("OpError",),
        r"is required but could not be found|Data types don't match",
        "the records hold other features than the dataset's description says",
        "`python -m data.audit DIR` says what they hold; mend the description or build the dataset anew",
        "Feature: image/encoded (data type: string) is required but could not be found.",
        "google-research/google-research#1887; tensorflow/models#8428; here",
    ),
    Failure(
        "fewer files than workers",
        ("OpError",),
        r"enough elements in this dataset for each shard",
        "a dataset of the model's own has fewer files than there are workers",
        "Read it by --dataset, which shares out records where files do not suffice",
        "There aren't enough elements in this dataset for each shard to have at least one element (# elems = 1, "
        "# shards = 2)",
        "tensorflow/tensorflow#36846",
    ),
    Failure(
        "input ended",
        ("OutOfRangeError", "Warning"),
        r"input ran out of data|End of sequence",
        "a dataset of the model's own ended before the run",
        "Read it by --dataset, which goes on for as many steps as the run has, or repeat() it",
        "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate at "
        "least `steps_per_epoch * epochs` batches.",
        "tensorflow/tensorflow#64476; here",
    ),
    Failure(
        "checkpoint does not fit",
        ("AssertionError", "ValueError", "NotFoundError"),
        r"not bound to checkpointed values|Key \S+ not found in checkpoint|TensorSliceReader constructor|"
        r"on optimizer \S+ with a\s+weight list of length",
        "a checkpoint that the model's code loads does not fit it, or is not there",
        "Take weights by --init_from, which names what does not fit; the run's own are put back without help",
        "You called `set_weights(weights)` on optimizer Adam with a  weight list of length 19, but the optimizer was "
        "expecting 0 weights",
        "tensorflow/tensorflow#30850, #55228, #61552; here",
    ),
)
