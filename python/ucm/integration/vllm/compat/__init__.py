"""What differs between versions of vLLM: which are served, and calls whose form has changed.

No other code of ucm mentions a version of vLLM. Where vLLM has added an argument, the caller passes
it on or leaves it out here.
"""
