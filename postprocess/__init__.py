"""From the JSON of runs to plots, tables and win rates: `python postprocess/X.py`."""
