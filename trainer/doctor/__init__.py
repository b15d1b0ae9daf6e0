"""`--mode=doctor`: looks at everything around a run and trains nothing.

    checkup.py                    which checks there are, in two rounds, and what comes of them: start reading here
    findings.py                   Case -> Check -> Finding: what is looked at, a look, what it has found
    runner.py                     each check in a process of its own, killed at its time limit
    report.py                     the page, and the exit code
    packages, computes, machine, environment, credentials, accelerator, locations, dataset    the checks

The process of the doctor itself never imports TensorFlow: where that aborts or never comes back, it lives to say so.
"""
