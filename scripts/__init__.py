"""Launchers, benchmarks and chaos. A package, so that the launchers can be imported, checked and tested."""
