"""The process around it all: workers, streams, its log."""
