"""Kinds of raw sources that `python -m data.build PATH` reads; one file per kind."""
