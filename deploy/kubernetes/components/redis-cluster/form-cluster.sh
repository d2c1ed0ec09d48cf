#!/bin/sh
# Joins nodes to a cluster in which each holds its share of the keys and none is copied. Does nothing if they are one.
#
#   NODES="HOST:PORT HOST:PORT HOST:PORT"   each announces its address (cluster-announce-ip)
#   PASSWORD_FILE                           optional
set -eu
cli=$(command -v valkey-cli || command -v redis-cli)
if [ -n "${PASSWORD_FILE:-}" ]; then
  REDISCLI_AUTH=$(cat "$PASSWORD_FILE")
  export REDISCLI_AUTH
fi
at() {
  node=$1
  shift
  "$cli" -h "${node%:*}" -p "${node##*:}" "$@"
}

addresses=
count=0
for node in $NODES; do
  until [ "$(at "$node" ping 2>/dev/null)" = PONG ]; do
    echo "waiting for $node"
    sleep 1
  done
  # Nodes meet by address, not by name.
  ip=$(at "$node" config get cluster-announce-ip | tail -n 1)
  addresses="$addresses $ip:${node##*:}"
  count=$((count + 1))
done

first=${NODES%% *}
known=$(at "$first" cluster info | tr -d '\r' | sed -n 's/^cluster_known_nodes://p')
if [ "$known" -ge "$count" ]; then
  echo "the cluster has $known nodes already"
  exit 0
fi
# shellcheck disable=SC2086 # a list
at "$first" --cluster create $addresses --cluster-replicas 0 --cluster-yes
