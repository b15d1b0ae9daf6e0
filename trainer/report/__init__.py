"""The report of a run, or of several side by side: one HTML page from the files that they left."""
