"""Make a failing call small while it goes on failing in the same way."""
