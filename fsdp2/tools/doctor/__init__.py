"""``fsdp2 doctor``: what is wrong, or slow, about a machine and its environment, found before a run finds it.

Each file asks one part: `software`, `variables`, `machine`, `gpus`, `exchange` (between ranks that it starts), `on_gpu`
(training steps on a GPU); the answers are `finding.Finding`s. The rest of fsdp2 imports none of it.
"""
