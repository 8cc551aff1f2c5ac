"""Run by every process of a test engine when it starts; see ``instruction_sets.py``."""

from instruction_sets import pin

pin()
