"""What a person reads before trusting a rewrite: plain data, text, files and a page."""
