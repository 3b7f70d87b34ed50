"""Everything around the engine: arguments, models, prompts, records, processes, progress, demo."""
