"""Options of a DataLoader for its workers in tests."""

import multiprocessing

# Workers are not forked from the test process: it has threads by then, whose locks a fork may copy while they are held.
# Without these modules in their server, each worker would import torch anew, which takes seconds.
PRELOADED = ["pytest", "paramp.checkpoint.resharding", "paramp.engine.initialize", "paramp.models"]
multiprocessing.set_forkserver_preload(PRELOADED)
WORKERS = {"multiprocessing_context": "forkserver"}
