"""Pairs a site makes of its own documents, for where nobody wrote questions.

    made.py       what a made pair is; one for each query; kept in a file
    cloze.py      inverse cloze, titles, keywords: no language model needed
    writing.py    queries that a language model writes, by prompt templates
    writers.py    the language models: one in this process, one behind a local socket
    replies.py    what a model has written so far, kept through interruptions
    round_trip.py a query whose passage isn't found by it teaches nothing
    negatives.py  hard and random negatives
    learning.py   which of the made pairs a site trains on

Nothing here leaves the site, and nothing learns from documents that are held out.
"""
