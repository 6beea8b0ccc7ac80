"""Keep attention right on a torch that has a bug: change the calls that would meet it, and no others."""
