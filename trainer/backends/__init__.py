"""What differs between Keras' backends, one package a backend with the same modules in it.

    cluster.py    `connect`, `rehearse`: from a `hardware.Target` to a `cluster.Cluster`, the devices of a run
    engine.py     `Engine`: the replicated step, loops of it, and its state (the contract: `trainer.replicated`)
    functions.py  functions compiled, differentiated, computed again in the backward pass
    tracing.py    a forward pass, traced for what the backend's own operations say (`lint`)
    export.py     a function of tensors as a SavedModel
    profiler.py   the trace of TensorBoard's profile
    lowering.py   a step as the program that XLA:TPU compiles, for `--mode=preflight`

All else is written with `keras.ops` and knows of no backend. tf.data reads the records, whatever the backend.
"""
