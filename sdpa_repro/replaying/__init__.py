"""One call run through every backend in every dtype and judged against float64."""
