"""What watches over a run: requests to stop, the lease of its directory, stalls, alerts."""
