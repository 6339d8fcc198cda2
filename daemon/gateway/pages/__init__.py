"""The site's pages: people ask in a browser, with nothing else installed."""
