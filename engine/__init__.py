"""One prompt, many rows: decoding and reading token ids in lockstep.

The engine knows token ids only: no text, no templates, no arguments. Importing it needs no GPU and
no optional kernel.
"""
