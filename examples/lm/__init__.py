"""The parts of `examples/train_lm.py`, one job a file.

options.py          the command line
distributed.py      the process group, this process's rank and device
parallelism.py      how the ranks are arranged: replicate x shard x tp
data.py             which text to train on, which to hold out
batches.py          which bytes each rank sees at each step
model.py            the transformer and the table of sizes
tensor_parallel.py  which part of which matrix a tensor-parallel rank has
build.py            meta device -> fully_shard -> initial weights: the place where `fsdp2` comes in
optimization.py     AdamW and the learning-rate schedule
trainer.py          the training loop
evaluation.py       held-out loss
bigram.py           the table of byte pairs that the model has to beat
generation.py       sampling text
checkpoints.py      saving and loading with torch.distributed.checkpoint
run_directory.py    what a run leaves on disk, and where
interruption.py     Ctrl-C
reporting.py        progress bar, metrics file
plotting.py         the pictures of the loss, and of what steps cost
"""
