# Runs the demo: `docker build -t heatproof .`, then `docker run --rm -v "$PWD/demo:/data/demo" heatproof`.
# For the CPU build of torch (the default one brings about 5 GB of CUDA libraries) add
# `--build-arg TORCH_INDEX=URL` with the CPU index that PyTorch's installation page shows.
FROM python:3.12-slim
WORKDIR /data
ARG TORCH_INDEX
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md CHANGELOG.md CITATION.cff LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir /src
ENTRYPOINT ["heatproof"]
CMD ["demo", "--out", "demo"]
