"""What users look at and plan with: explanations, estimates, timelines, metrics, the command line.

Reads the engine, which knows nothing of it. Every part works with torch alone; what is nicer with another library
(rich, matplotlib, PyYAML) comes with ``fsdp2[tools]``.
"""
