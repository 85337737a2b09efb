"""Forecast of a run's peak memory from the model's config.json alone: what `gdtrain plan` shows.

Nothing of a model is loaded, and mlx-lm is not imported: a forecast takes no longer than reading two files.
"""
