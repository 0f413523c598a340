"""How much a loop over memory or over a file takes at a time: every such size, so that one place tells and sets them.

Read them when they are used, as ``loop_block_sizes.STEP_BLOCK``. They bound memory and make loops fast; no result
depends on them. What defines an arithmetic, such as the rows of the norm, is with its code.
"""

STEP_BLOCK = {"cpu": 2**19, "cuda": 2**26}
"""Elements of a block of the optimizer's step, by device.

On a CPU few enough to stay in the cache between the passes over them, and so many that some microseconds of Python for
each pass do not count. On a GPU, where a launch costs some 5 us, mostly a whole buffer, of 2**25 elements and more: a
pass over 2**26 fp32 elements takes an H200, with 4.8 TB/s, some 100 us, one over 2**23 only 14 us. Each fp32 temporary
then takes 256 MiB, at a time when there are no activations. Computed, not measured.
"""
SQUARES_BLOCK = {"cpu": 2**16, "cuda": 2**25}
"""Elements of a block of exact squares (:mod:`paramp.exact.sum_of_squares`), which has three fp64 temporaries.

16 operations a block: 229,000 launches for 10**9 elements in blocks of 2**16, 484 in blocks of 2**25, with 768 MiB.
"""
WIDEN_BLOCK = 2**20
"""Elements of a half-precision CPU tensor that are widened at once for its norm: few enough to stay in the cache. A
multiple of the norm's rows."""
BUCKET = 2**25
"""Elements; a buffer of this size or more takes no further parameter. One collective reduces one buffer over data
ranks. It also limits the memory that exists twice while parameters are copied into their buffers."""

KEPT = 2**19
"""Elements of a temporary of a loop; longer ones are not kept for the next use (``paramp.base.scratch_memory_cpu``)."""
APART = 2**18
"""Bytes from which tensors begin apart (:mod:`paramp.base.staggered_memory_cpu`)."""
HUGE = 2**22
"""Bytes from which tensors are given huge pages: two of them."""

ATTENTION_TILE = {"cpu": 2**9, "cuda": 2**11}
"""Queries, and as many keys, of which attention over the context axis has a mask, or plain scores, at once.

A tile of one head takes 1 MiB of fp32 on a CPU, which fits the cache; on a GPU 16 MiB, for few launches."""

SUM_PIECE = 2**19
"""Elements that are summed in a tree at a time: the slices that are sent, and those received, exist besides."""

SAMPLED_RUN = 256
"""Rows of 64 elements of a weight, of which each step looks at one (``weights_changed_in_place`` in ``optim``)."""
HASHED_WORDS = {"cpu": 2**18, "cuda": 2**22}
"""32-bit words hashed at once, by device; on others as on CUDA. Each needs 16 bytes of temporary memory."""
COUNTED = 2**22
"""Elements of a gradient that a histogram converts to fp64 at once."""
TRACE_FILE = 2**28
"""Bytes of tensors from which a trace of a run goes on in another file."""

CHECKED_READ = 2**22
"""Bytes of a checkpoint's file that are read at once for its checksum."""
