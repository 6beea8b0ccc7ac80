"""From a failing call to what a maintainer runs: a script that imports torch alone, an issue, a dump for strangers."""
