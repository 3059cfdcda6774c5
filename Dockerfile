# A server with the OpenAI API. By default it serves the packaged model:
#
#   docker build --tag topograd .
#   docker run --rm --publish 127.0.0.1:8000:8000 --env TOPOGRAD_TOKEN=secret topograd
#   docker run --rm --publish 127.0.0.1:8000:8000 --env TOPOGRAD_TOKEN=secret --volume "$PWD/runs/mine:/run:ro" topograd /run
#
# Clients send "Authorization: Bearer secret". For a small image build with torch's CPU wheels:
# --build-arg PIP_EXTRA_INDEX_URL=INDEX, with torch's own index of CPU builds.
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
# For the native kernels; without it they are left out.
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY src src
RUN python -m venv /venv && \
    /venv/bin/pip install --no-cache-dir --constraint constraints.txt '.[models,serve]'

FROM python:3.11-slim
COPY --from=build /venv /venv
RUN useradd --create-home topograd
USER topograd
WORKDIR /home/topograd
ENV PATH="/venv/bin:$PATH" PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["topograd", "serve", "--host", "0.0.0.0", "--port", "8000"]
