# The image of exporter and remediator; docs/how-to/install.md shows how to run it.
# BASE needs Python 3.11 or later with pip, and sh, grep and cp. Only what the classic builder knows is used.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
# What is installed, from where, and by which pip: offline, a wheel in wheels/, those alone, and pip's own wheel.
ARG PACKAGE="/src[exporter,remediator,postgresql,evidence,kubernetes]"
ARG PIP="-m pip"
ARG PIP_OPTIONS=""
WORKDIR /src
COPY . /src
# The lock file's versions, without its hashes: those of /src itself and of wheels built here are in no lock file.
RUN grep -oE '^[a-z0-9._-]+==[^ ]+' requirements.lock > /tmp/constraints.txt \
 && python3 ${PIP} install --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
      --target /opt/gpuwarden --constraint /tmp/constraints.txt ${PIP_OPTIONS} "${PACKAGE}"

FROM ${BASE}
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="gpuwarden" \
      org.opencontainers.image.description="Sees a wedged GPU worker and mends it: exporter and remediator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PYTHONPATH=/opt/gpuwarden PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    GPUWARDEN_REVISION="${REVISION}" \
    GPUWARDEN_HEALTH_URL=http://127.0.0.1:29835/-/ready
COPY --from=build /opt/gpuwarden /opt/gpuwarden
# A user without a name, so that no base needs useradd. `remediator serve` runs as it; the exporter, which reads the
# processes of all users, and `remediator execute`, which uses the Docker socket, want --user 0.
USER 65532:65532
WORKDIR /tmp
EXPOSE 29835 9836
STOPSIGNAL SIGTERM
# The exporter's; for `remediator serve` set GPUWARDEN_HEALTH_URL to its port, for `remediator execute` --no-healthcheck.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s --retries=3 \
  CMD ["python3", "-c", "import os, urllib.request as web; web.build_opener(web.ProxyHandler({})).open(os.environ['GPUWARDEN_HEALTH_URL'], timeout=4)"]
ENTRYPOINT ["python3", "-m", "gpuwarden"]
CMD ["--help"]
