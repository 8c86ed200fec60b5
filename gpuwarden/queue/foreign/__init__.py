"""Values and errors of foreign code: of jobs and their libraries."""
