"""Documents to passages, the library, the dense index, BM25, fusion, answering."""
