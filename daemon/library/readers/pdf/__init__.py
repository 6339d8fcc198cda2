"""PDF files to blocks: text, headings, tables and figures, each with its page and place."""
