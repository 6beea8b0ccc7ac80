"""The whole chain in one folder: which stages there are, what is kept of them, and when to stop early."""
