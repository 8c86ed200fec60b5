"""What both programs need to serve HTTP: the web configuration file, limits of callers, errors of binding."""
