"""``python -m extras.gpu_check``: what only GPUs can show, in jobs in the order of their worth; a report to send.

`jobs` lists them; `clock` runs them until the time is over; `report` judges what they said, and writes it down. A job
is a command in a process of its own, which says what it found in lines of JSON (`says`): `beside_torch` (the same
training by torch's `fully_shard`), `batch` (the programs of `programs/`), `tests` (pytest), `benchmarks.llama_step`.
``--device cpu`` rehearses all of it; tests plant `faults`, and see each job complain.
"""
